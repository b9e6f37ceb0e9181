# Sweeps to and fro over a growing row of marks, for ever: only the limit of steps ends it.
name: endless sweep
blank: _
start: left
halt:
input: x
steps: 60

right x -> x R right
right _ -> x L left
left x -> x L left
left _ -> x R right
