"""What commands wrote, kept in research/data, and the tables of pages that are made of it."""
