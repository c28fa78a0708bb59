"""The private names of other packages that tdcollect uses: all of them, and only here.

One module per package, and one for TorchRL's collector. Each name has a test in
``tests/test_upstream*.py`` that fails when upstream renames it or gives it another meaning.
``tests/test_private_names.py`` finds uses anywhere else; a subclass still defines the methods that
its parent calls.
"""
