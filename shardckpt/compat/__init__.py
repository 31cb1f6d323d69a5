"""Module paths and names of other libraries, mapped to ours. No other room imports this one."""
