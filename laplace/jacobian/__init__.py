"""The factored Jacobian: blocks of outer products, and what is contracted from them."""
