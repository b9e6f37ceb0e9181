# Counts up in binary, for ever: only the limit of steps ends it.
name: endless counter
blank: _
start: carry
halt:
input: 0
steps: 60

carry 1 -> 0 L carry
carry * -> 1 R back
back _ -> _ L carry
back * -> * R back
