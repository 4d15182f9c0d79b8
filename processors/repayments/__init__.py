"""A debt split anew: a new charge at the payment gateway, the old one cancelled, and who must know told."""
