"""What papers print (JSON), and the tables, curves and claims that a report makes of it."""
