"""`topology verify`: is each worker's topology the same from its node's label to the router?

gather/ reads facts, join builds one chain of custody for each worker (node label, pod label, file,
card, taint, router), and checks/ judge it: one file for each hundred of codes. Only gather/ and run
do input and output.
"""
