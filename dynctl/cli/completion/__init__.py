"""Completion on TAB in bash, zsh and fish.

``tree`` reads the commands as they are, ``meanings`` says what each value can be, ``bash``, ``zsh``
and ``fish`` write a script of both, ``live`` answers for what only a running fleet or a file knows.
What a script can know it knows by itself: no Python starts for it.
"""
