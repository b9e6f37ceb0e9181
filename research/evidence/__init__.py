"""What commands wrote, kept in docs/evidence, and the tables of the docs that are made of it."""
