"""What `make demo` and the tests need beside the product: a mail server that keeps what it gets."""
