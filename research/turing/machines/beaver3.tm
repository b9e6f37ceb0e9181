# The busy beaver of three states by steps: 21, with five ones.
name: busy beaver 3
blank: 0
start: A
halt: H
input:
steps: 50

A 0 -> 1 R B
A 1 -> 1 R H
B 0 -> 1 L B
B 1 -> 0 R C
C 0 -> 1 L C
C 1 -> 1 L A
