"""`klformer report`: runs, analyses and benchmarks as one page that needs nothing but a browser."""
