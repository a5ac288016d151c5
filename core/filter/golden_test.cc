// The golden vectors (testdata/README.md) on the filter, with every set of kernels that this machine runs, and on the
// double reference. A case that is neither run nor known to wait for a feature fails.
#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/filter/filter.h"
#include "core/filter/float_filter.h"
#include "core/filter/reference.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace bmuf {
namespace {

using Json = nlohmann::json;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

const Json& File() {
  static const Json* const file = [] {
    std::ifstream stream("core/filter/testdata/golden_vectors.json");
    return new Json(Json::parse(stream));
  }();
  return *file;
}

// Cases whose rule is not in this build, and what they wait for.
const std::map<std::string, std::string>& Waiting() {
  static const auto* const waiting = new std::map<std::string, std::string>{
      {"slowmo_n4_lr_decay", "momentum in units of the inner learning rate, rescaled when that decays"},
      {"dn_c0_N2", "delayed Nesterov"},
      {"dn_c0.25_N2", "delayed Nesterov"},
      {"async_staleness_weights", "bounded staleness"},
      {"late_delta_policies", "bounded staleness"},
      {"dylu", "block lengths from worker speeds"},
      {"streaming_a0_tau0", "streaming fragments"},
      {"streaming_a0.5_tau0", "streaming fragments"},
      {"streaming_a0_tau1", "streaming fragments"},
      {"streaming_a1_tau1", "streaming fragments"},
      {"bmuf_adam_moment_beta0.9", "BMUF-Adam"},
      {"decoupled_rda", "decoupled merge by norm and direction"},
  };
  return *waiting;
}

// One round of a case: the deltas that count, their weights, and the momentum in force.
struct Round {
  std::vector<Doubles> deltas;
  Doubles weights;
  double eta = 0;
  double rescale = 1;
  const Json* expected = nullptr;
};

// A case in one form, whatever form it has in the file.
struct Case {
  v1::OuterOptimizer outer;
  double v_unit = 1;         // The file's momentum times this is v.
  const char* v_name = "v";  // How the file names the momentum.
  uint32_t trajectories = 1;
  Doubles start;
  std::vector<Round> rounds;
};

v1::OuterOptimizer Outer(v1::Variant variant, double zeta, double eta) {
  v1::OuterOptimizer outer;
  outer.set_variant(variant);
  outer.set_block_learning_rate(zeta);
  outer.set_block_momentum(eta);
  return outer;
}

void ReadRule(const Json& json, Case* c) {
  const Json& params = json.at("params");
  const std::string rule = params.at("rule");
  c->trajectories = params.contains("N") ? params.at("N").get<uint32_t>() : 1;
  const auto number = [&params](const char* name) { return params.at(name).get<double>(); };
  if (rule == "torch_sgd_nesterov") {
    c->outer = Outer(v1::VARIANT_NESTEROV, number("lr"), number("momentum"));
    c->v_name = "buf";
    c->v_unit = -number("lr");
  } else if (rule == "slowmo") {
    c->outer = Outer(v1::VARIANT_CLASSICAL, number("alpha"), number("beta"));
    c->v_name = "u";
    c->v_unit = -number("gamma");
  } else if (rule == "fedadam" || rule == "fedyogi" || rule == "fedadagrad") {
    c->outer = Outer(rule == "fedadam"   ? v1::VARIANT_FED_ADAM
                     : rule == "fedyogi" ? v1::VARIANT_FED_YOGI
                                         : v1::VARIANT_FED_ADAGRAD,
                     number("eta"), 0);
    c->outer.set_beta1(number("b1"));
    c->outer.set_beta2(number("b2"));
    c->outer.set_tau(number("tau"));
    c->v_name = "m";
  } else if (rule == "cbm_elastic") {
    c->trajectories = params.at("registered");
    c->outer = Outer(v1::VARIANT_CLASSICAL, number("block_lr"), AutoBlockMomentum(c->trajectories));
  } else {
    static const auto* const variants = new std::map<std::string, v1::Variant>{
        {"caffe2_cbm", v1::VARIANT_CLASSICAL},
        {"cbm_weighted", v1::VARIANT_CLASSICAL},
        {"nbm", v1::VARIANT_NESTEROV},
        {"caffe2_nesterov", v1::VARIANT_CAFFE2_NESTEROV},
        {"fairseq_nbm", v1::VARIANT_FAIRSEQ_NESTEROV},
        {"cntk_cbm", v1::VARIANT_CNTK_CLASSICAL},
        {"cntk_nbm", v1::VARIANT_CNTK_NESTEROV},
        {"pika_nbm", v1::VARIANT_PIKA},
    };
    ASSERT_TRUE(variants->count(rule)) << "the rule " << rule << " is neither built nor listed as waiting";
    c->outer = Outer(variants->at(rule), number("block_lr"), number("block_momentum"));
    const bool descent = rule == "fairseq_nbm" || rule == "cntk_nbm" || rule == "cntk_cbm" || rule == "pika_nbm";
    if (descent) {
      c->v_name = "s";
      c->v_unit = -1;
    }
  }
}

Doubles Minus(const Doubles& a, const Doubles& b) {
  Doubles out(a.size());
  for (size_t i = 0; i < a.size(); ++i) out[i] = a[i] - b[i];
  return out;
}

void ReadRounds(const Json& json, Case* c) {
  const Json& rounds = json.at("rounds");
  const double frozen = c->outer.block_momentum();
  if (json.contains("worker_params_after_block1")) {  // Deltas against the master's start.
    c->start = json.at("worker_inits").at(0).get<Doubles>();
    Round round;
    for (const Json& end : json.at("worker_params_after_block1")) {
      round.deltas.push_back(Minus(end.get<Doubles>(), c->start));
    }
    round.eta = frozen;
    round.expected = &rounds.at(0);
    c->rounds.push_back(round);
    return;
  }
  size_t first = 0;
  if (json.contains("worker_params_after_warmup")) {  // The first worker's parameters are version 0, v stays 0.
    c->start = json.at("worker_params_after_warmup").at(0).get<Doubles>();
    EXPECT_EQ(rounds.at(0).at("global").get<Doubles>(), c->start);
    EXPECT_EQ(rounds.at(0).at("state").at("v").get<Doubles>(), Doubles(c->start.size(), 0.0));
    first = 1;
  } else {
    c->start = json.at("init_global").get<Doubles>();
  }
  double eta_before = frozen;
  for (size_t r = first; r < rounds.size(); ++r) {
    Round round;
    round.expected = &rounds.at(r);
    round.eta = frozen;
    if (rounds.at(r).contains("local_params")) {  // Deltas against the model that the case says they started from.
      const Doubles base = r == 0 ? c->start : rounds.at(r - 1).at("global").get<Doubles>();
      for (const Json& local : rounds.at(r).at("local_params"))
        round.deltas.push_back(Minus(local.get<Doubles>(), base));
    } else {
      round.deltas = json.at("deltas").at(r - first).get<std::vector<Doubles>>();
    }
    if (json.contains("weights")) round.weights = json.at("weights").at(r - first).get<Doubles>();
    if (rounds.at(r).contains("present")) {
      std::vector<Doubles> present;
      for (const size_t worker : rounds.at(r).at("present").get<std::vector<size_t>>()) {
        present.push_back(round.deltas[worker]);
      }
      round.deltas = present;
      const std::string policy = json.at("params").at("policy");
      if (policy != "fixed_eta_div_present") round.eta = AutoBlockMomentum(static_cast<uint32_t>(present.size()));
      if (policy == "eta_follows_present_rescaled") round.rescale = MomentumRescale(eta_before, round.eta);
      EXPECT_NEAR(round.eta, rounds.at(r).at("eta").get<double>(), 1e-15);
      EXPECT_EQ(present.size(), rounds.at(r).at("divisor").get<size_t>());
      eta_before = round.eta;
    }
    c->rounds.push_back(round);
  }
}

enum class Match { kExact, kFloat, kDouble };

template <typename T>
void Expect(Match match, const std::vector<T>& got, const Json& json, double unit, const std::string& what) {
  const Doubles want = json.get<Doubles>();
  ASSERT_EQ(want.size(), got.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    const double wanted = unit * want[i];
    if (match == Match::kExact) {
      EXPECT_EQ(static_cast<double>(got[i]), wanted) << what << " element " << i;
    } else {
      EXPECT_NEAR(static_cast<double>(got[i]), wanted,
                  (match == Match::kFloat ? 1e-6 : 1e-12) * std::max(1.0, std::abs(wanted)))
          << what << " element " << i;
    }
  }
}

// What the file says of the state after a round, against B, W, v, u.
template <typename Filter>
void ExpectState(Match match, const Case& c, const Json& expected, const Filter& filter, const std::string& what) {
  Expect(match, filter.B, expected.at("global"), 1, what + " broadcast");
  if (expected.contains("v")) Expect(match, filter.v, expected.at("v"), 1, what + " v");
  if (!expected.contains("state")) return;
  std::set<std::string> known = {c.v_name};
  const Json& state = expected.at("state");
  Expect(match, filter.v, state.at(c.v_name), c.v_unit, what + " momentum");
  if (state.contains("W")) {
    Expect(match, filter.W, state.at("W"), 1, what + " model");
    known.insert("W");
  } else if (c.outer.variant() != v1::VARIANT_NESTEROV) {
    Expect(match, filter.W, expected.at("global"), 1, what + " model");
  }
  if (state.contains("v_prev")) {  // After the round this is its v.
    Expect(match, filter.v, state.at("v_prev"), 1, what + " v_prev");
    known.insert("v_prev");
  }
  if (std::string(c.v_name) == "m") {
    Expect(match, filter.u, state.at("v"), 1, what + " second moment");
    known.insert("v");
  }
  for (const auto& item : state.items()) EXPECT_TRUE(known.count(item.key())) << item.key() << " is not checked";
}

Floats ToFloats(const Doubles& x) { return Floats(x.begin(), x.end()); }

void RunOnFilter(const Json& json, const Case& c, const Kernels& kernels) {
  const std::string name = json.at("name").get<std::string>() + " " + kernels.name;
  const Match match = json.value("float32_exact", false) ? Match::kExact : Match::kFloat;
  FloatFilter filter(kernels, c.outer, ToFloats(c.start));
  for (size_t r = 0; r < c.rounds.size(); ++r) {
    const Round& round = c.rounds[r];
    const std::string what = name + " round " + std::to_string(r + 1);
    std::vector<Floats> deltas;
    for (const Doubles& delta : round.deltas) deltas.push_back(ToFloats(delta));
    const Floats mean = filter.Mean(deltas, round.weights);
    if (round.expected->contains("dbar")) Expect(match, mean, round.expected->at("dbar"), 1, what + " mean");
    filter.outer.set_block_momentum(round.eta);
    filter.Step(mean, c.trajectories, round.rescale);
    ExpectState(match, c, *round.expected, filter, what);
  }
}

void RunOnReference(const Json& json, const Case& c) {
  ReferenceFilter filter(c.outer, c.start);
  for (size_t r = 0; r < c.rounds.size(); ++r) {
    const Round& round = c.rounds[r];
    Doubles mean(c.start.size(), 0.0);
    double total = 0;
    for (size_t k = 0; k < round.deltas.size(); ++k) {
      const double weight = round.weights.empty() ? 1.0 : round.weights[k];
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += weight * round.deltas[k][i];
      total += weight;
    }
    for (double& value : mean) value /= total;
    filter.outer.set_block_momentum(round.eta);
    filter.Step(mean, c.trajectories, round.rescale);
    ExpectState(Match::kDouble, c, *round.expected, filter,
                "reference " + json.at("name").get<std::string>() + " round " + std::to_string(r + 1));
  }
}

TEST(GoldenVectors, EveryCaseIsRunOrWaitsForANamedFeature) {
  std::set<std::string> names, run;
  for (const Json& json : File().at("cases")) {
    const std::string name = json.at("name");
    SCOPED_TRACE(name);
    EXPECT_TRUE(names.insert(name).second) << "listed twice";
    if (const auto waiting = Waiting().find(name); waiting != Waiting().end()) {
      std::cout << "WAITING " << name << ": " << waiting->second << "\n";
      continue;
    }
    Case c;
    ReadRule(json, &c);
    if (HasFatalFailure()) continue;
    ReadRounds(json, &c);
    ASSERT_FALSE(c.rounds.empty());
    RunOnReference(json, c);
    for (const Kernels* kernels : AvailableKernels()) RunOnFilter(json, c, *kernels);
    run.insert(name);
    std::cout << "RUN     " << name << ": " << c.rounds.size() << " rounds\n";
  }
  for (const auto& [name, feature] : Waiting()) {
    EXPECT_TRUE(names.count(name)) << name << " waits for " << feature << " but is not in the file";
  }
  EXPECT_EQ(run.size() + Waiting().size(), names.size());
  EXPECT_GE(run.size(), 20u);
}

// Averaging is classical block momentum with zeta 1 and eta 0, under its own name.
TEST(GoldenVectors, ModelAveragingHoldsForTheVariantOfThatName) {
  for (const Json& json : File().at("cases")) {
    if (json.at("name") != "model_averaging_n4") continue;
    Case c;
    ReadRule(json, &c);
    ReadRounds(json, &c);
    FloatFilter filter(ScalarKernels(), Outer(v1::VARIANT_AVERAGING, 1, 0), ToFloats(c.start));
    for (const Round& round : c.rounds) {
      std::vector<Floats> deltas;
      for (const Doubles& delta : round.deltas) deltas.push_back(ToFloats(delta));
      filter.Step(filter.Mean(deltas));
      Expect(Match::kExact, filter.B, round.expected->at("global"), 1, "averaging");
      EXPECT_EQ(filter.W, filter.B);
    }
    return;
  }
  FAIL() << "the case is not in the file";
}

// How far from an optimum a block may go before the outer loop diverges, d = -kappa B, as the file measured it.
TEST(GoldenVectors, StabilityLimitsAreThoseMeasured) {
  const std::map<std::string, v1::Variant> columns = {{"cbm_kappa_max", v1::VARIANT_CLASSICAL},
                                                      {"nbm_paper_kappa_max", v1::VARIANT_NESTEROV},
                                                      {"caffe2_nesterov_kappa_max", v1::VARIANT_CAFFE2_NESTEROV},
                                                      {"fairseq_nbm_kappa_max", v1::VARIANT_FAIRSEQ_NESTEROV}};
  const auto diverges = [](v1::Variant variant, double eta, double kappa) {
    ReferenceFilter filter(Outer(variant, 1, eta), {1.0});
    for (int round = 0; round < 40000 && std::abs(filter.B[0]) < 1e6; ++round) filter.Step({-kappa * filter.B[0]});
    return std::abs(filter.B[0]) >= 1e6;
  };
  for (const Json& row : File().at("meta").at("stability_dbar=-kappa*B")) {
    const double eta = row.at("eta");
    EXPECT_EQ(eta, AutoBlockMomentum(row.at("N").get<uint32_t>()));
    for (const auto& [column, variant] : columns) {
      const double limit = row.at(column);
      EXPECT_FALSE(diverges(variant, eta, 0.98 * limit)) << column << " N=" << row.at("N");
      EXPECT_TRUE(diverges(variant, eta, 1.02 * limit)) << column << " N=" << row.at("N");
    }
  }
}

}  // namespace
}  // namespace bmuf
