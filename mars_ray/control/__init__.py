"""Control of thresholds by cluster load: replicas send reports, and the controller answers with directives."""
