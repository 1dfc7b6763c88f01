"""Fine-tuning with the autoregressive or the MARS objective: plain torch inside a Ray shell, with exact resume."""
