"""Module paths and names of other libraries, mapped to ours; nothing else in the project imports them."""
