"""The user's network: preserved during calls, checked for changes between them."""
