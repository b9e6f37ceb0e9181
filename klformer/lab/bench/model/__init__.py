"""Speed and memory of whole models of the paper."""
