"""The operators' page: look at everything, retry what failed, ask for a repayment. No other way to change anything."""

NAME = "admin"
