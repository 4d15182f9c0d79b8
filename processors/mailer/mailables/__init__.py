"""One folder per kind of e-mail: subject.txt, body.txt, body.html, and sample.json, which names the kind's variables.

`load_mailable` in `processors/mailer/mailable.py` reads them; nothing else has to be registered.
"""
