# Unary addition: the last 1 of the second number takes the place of the plus sign.
name: unary addition
blank: _
start: take
halt: done
input: 111+11
steps: 100

take 1 -> _ L seek
take * -> _ L done
seek 1 -> 1 L seek
seek * -> 1 L done
