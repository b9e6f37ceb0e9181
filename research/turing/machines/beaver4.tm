# The busy beaver of four states: 107 steps, 13 ones.
name: busy beaver 4
blank: 0
start: A
halt: H
input:
steps: 200

A 0 -> 1 R B
A 1 -> 1 L B
B 0 -> 1 L A
B 1 -> 0 L C
C 0 -> 1 R H
C 1 -> 1 L D
D 0 -> 1 R D
D 1 -> 0 R A
