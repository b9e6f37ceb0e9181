"""How much of the predictions is chance."""
