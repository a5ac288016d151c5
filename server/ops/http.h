// A tiny HTTP server for people and scrapers: GET of a few fixed paths, on a port and a thread of its own.
#ifndef BMUF_SERVER_OPS_HTTP_H_
#define BMUF_SERVER_OPS_HTTP_H_

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

// "host:port" or "[v6]:port" in its parts. Errors: InvalidArgument naming the text.
struct HostPort {
  std::string host;
  int port = 0;
};
absl::StatusOr<HostPort> ParseHostPort(const std::string& address);
// Whether only this machine can reach `host` (an address or "localhost").
bool IsLoopback(const std::string& host);

// Thread-compatible.
class HttpServer {
 public:
  // Path -> what answers it. Called on the server's thread: may take a moment, holds up only other scrapers.
  using Handlers = std::map<std::string, std::function<HttpAnswer()>>;

  // Serves from now on. Errors: InvalidArgument for a malformed address; Unavailable naming the address if it cannot be
  // bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, Handlers handlers);
  // Ends open connections and waits for its thread.
  ~HttpServer();

  // "host:port" as bound.
  const std::string& address() const { return address_; }

 private:
  struct Library;
  HttpServer(std::unique_ptr<Library> library, std::string address);

  std::unique_ptr<Library> library_;
  const std::string address_;
  std::thread thread_;
};

}  // namespace bmuf::ops

#endif  // BMUF_SERVER_OPS_HTTP_H_
