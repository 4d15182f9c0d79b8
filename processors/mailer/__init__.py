"""`recipients` -> SMTP: one mail per registration, deduplicated on `email_dispatches`."""
