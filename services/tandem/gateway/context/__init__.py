"""What both front ends share with the parts behind them: interfaces, who sent a request, and its rate limits.

`interfaces` lists what a front end needs; `request_context` is the caller of one request; `supervise` keeps endless
tasks alive."""
