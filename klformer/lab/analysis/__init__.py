"""The paper's theory and measurements as functions of models and numbers; no files, no command line."""
