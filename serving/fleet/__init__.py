"""Workers in other processes: replicas on Ray Serve, which scale with the load, and processes of this machine."""
