"""The web console: its page and assets, the state it polls, and the history of ended requests that it shows.

`routes` serves it; `view` composes what one viewer may see; `history` keeps the last requests.
"""
