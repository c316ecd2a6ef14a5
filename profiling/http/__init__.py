"""The batch server put together, and the load that is sent to one."""
