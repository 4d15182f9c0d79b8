"""What runs in the peers' environment: FastStream's side of the comparison, and the publisher that feeds it."""
