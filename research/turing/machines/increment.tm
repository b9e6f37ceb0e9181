# Adds one to a binary number, from its last digit.
name: binary increment
blank: _
start: carry
halt: done
input: 110111
steps: 100

carry 1 -> 0 L carry
carry 0 -> 1 L done
carry _ -> 1 L done
