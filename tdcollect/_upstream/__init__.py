"""The private names of other packages that tdcollect uses: all of them, and only here.

One module per package. Each name has a test in ``tests/test_upstream.py`` that fails when upstream
renames it or gives it another meaning; ``tests/test_private_names.py`` finds uses elsewhere. Only
the methods that a subclass must override are defined outside.
"""
