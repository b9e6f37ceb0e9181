"""Pretrained runs beside each other, and what they would reach without looking."""
