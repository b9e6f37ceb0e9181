"""Speed and memory, measured side by side with what would be used instead."""
