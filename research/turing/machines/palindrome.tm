# Takes a letter from the right end, looks for it at the left end, and erases both.
name: palindrome
blank: _
start: take
halt: yes no
input: abba
steps: 200

take a -> _ L left-a
take b -> _ L left-b
take _ -> _ R yes

left-a _ -> _ R check-a
left-a * -> * L left-a
left-b _ -> _ R check-b
left-b * -> * L left-b

check-a a -> _ R right
check-a b -> b R no
check-a _ -> _ R yes
check-b b -> _ R right
check-b a -> a R no
check-b _ -> _ R yes

right _ -> _ L take
right * -> * R right
