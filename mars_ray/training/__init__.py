"""Fine-tuning with the autoregressive or the MARS objective; exact resume, plain torch inside a Ray shell."""
