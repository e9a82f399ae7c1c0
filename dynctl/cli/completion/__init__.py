"""Shell completion in bash, zsh and fish.

``tree`` reads the commands, ``values`` defines the possible values of options, ``bash``, ``zsh``
and ``fish`` write the scripts, ``live`` lists names from a running fleet or a file. The scripts
contain everything else, so that no Python starts for it.
"""
