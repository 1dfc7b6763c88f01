"""What a company adds around an endpoint: accounts, limits, usage, batches, stored responses, models at run time."""
