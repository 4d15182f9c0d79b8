"""RabbitMQ and PostgreSQL for development and tests, started from nothing on Debian 12 or 13; standard library only.

Not for production: passwords are public, everything listens on 127.0.0.1, data lie in one folder that may be deleted
after `down`.
"""
