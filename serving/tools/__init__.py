"""Tool calls and thoughts in answers: one small module for each format that models are trained on."""
