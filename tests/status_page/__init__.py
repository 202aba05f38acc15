"""The status page in a real browser: the stage it is played on, the browser, and the pictures."""
