// A small HTTP server for metrics and health, apart from the data port.
#ifndef BMUF_SERVER_OPS_HTTP_SERVER_H_
#define BMUF_SERVER_OPS_HTTP_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace bmuf::ops {

struct HttpAnswer {
  int code = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// Serves GET of fixed paths on one thread of its own. Destroying it stops it.
class HttpServer {
 public:
  // Called on the server's thread, one at a time; may wait shortly.
  using Handler = std::function<HttpAnswer()>;

  // `address`: "host:port", port 0 picks one. Errors: INVALID_ARGUMENT for an address, UNAVAILABLE if it is taken.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           std::map<std::string, Handler> handlers);
  ~HttpServer();

  // Where it listens, with the real port.
  const std::string& address() const { return address_; }

 private:
  struct Events;
  HttpServer(std::unique_ptr<Events> events, std::string address);

  const std::unique_ptr<Events> events_;
  const std::string address_;
  std::thread thread_;
};

}  // namespace bmuf::ops

#endif  // BMUF_SERVER_OPS_HTTP_SERVER_H_
