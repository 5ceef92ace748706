"""Results as text, tables, JSON values and pictures. Nothing here measures or opens a model."""
