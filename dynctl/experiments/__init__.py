"""`dynctl test`: prove a fleet by sending it small requests.

`canary` sends them and keeps their bounds, `prompts` makes their texts, a group of `groups/` sends
what its checks need and judges it, `trial` runs the groups.
"""
