"""Other engines beside this one, on the same files and workloads: python -m tools.peers --help"""
