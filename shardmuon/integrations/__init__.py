"""What some training frameworks need to make and keep our optimizer; one module each.

Nothing here is imported by the rest of the package, so that no framework has to be installed.
"""
