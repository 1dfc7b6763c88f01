"""Training and evaluation data: records, chat formatting, packing and generated tasks."""
