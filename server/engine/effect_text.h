// Effects and watch events as one line of text each, for transcripts and comparison in tests.
#ifndef BMUF_SERVER_ENGINE_EFFECT_TEXT_H_
#define BMUF_SERVER_ENGINE_EFFECT_TEXT_H_

#include <string>

#include "server/engine/engine.h"

namespace bmuf::engine {

std::string EffectText(const Effect& effect);
std::string WatchText(const v1::WatchRoundResponse& event);

}  // namespace bmuf::engine

#endif  // BMUF_SERVER_ENGINE_EFFECT_TEXT_H_
