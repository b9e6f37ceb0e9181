"""Training: schedules, checkpoints, evaluation and the one loop."""
