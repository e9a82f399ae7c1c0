"""A live deployment as its own router sees it: who is there, what they cache, what they carry.

Nothing here writes to the deployment: no lease, no key, no reservation.
"""
