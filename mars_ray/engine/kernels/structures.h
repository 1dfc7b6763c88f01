// A network and the batch of a forward, as decoder.py and adapter.py pass them.
#pragma once
#include <cstdint>

#include "activation.h"
#include "linear.h"
#include "rms_norm.h"

struct Layer {
  const float* attention_norm;
  Matrix qkv;
  const float* query_norm;  // may be null
  const float* key_norm;    // may be null
  Matrix output;
  const float* output_norm;  // norm of the attention's output; may be null
  const float* mlp_norm;
  Matrix gate_up;
  Matrix down;
  const float* down_norm;  // norm of the MLP's output; null if and only if output_norm is
  int64_t window;          // sliding window; 0 means none
  int64_t rotary;          // index of its rotary embedding in the batch
};

struct Model {
  int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, mask_id;
  int64_t rotary_dim;  // leading numbers of a head that are rotated
  Activation activation;
  NormRounding norm_rounding;
  float norm_epsilon, scaling;
  float attention_cap, logit_cap;  // 0 means none
  float embedding_scale;           // rounded to the type of the embedding
  const void* embedding;
  const float* final_norm;
  Matrix head;
  const Layer* layers;
};

struct Adapter {
  const void* mask_embedding;  // [masks, hidden]
  const LowRank* pairs;        // four per layer: qkv, output, gate_up, down
  int64_t ranks;               // maximum over the pairs
};

// A contiguous range of masks that one adapter decodes.
struct Group {
  const Adapter* adapter;
  int64_t first, count;
};

struct Batch {
  int64_t positions, picks, threads, num_groups;
  const Group* groups;  // masks of each adapter, after all other positions
  const int64_t* offsets;  // number of masks before a mask in its row
  const int64_t* ids;
  const int64_t* slots;
  const int64_t* places;    // positions in the sequence
  const int64_t* columns;   // columns of the slot that keys and values are written to
  const int64_t* prefixes;  // see Sight
  const uint64_t* behind;
  const float* cosines;  // [rotary embeddings, rotated, rotary_dim], of the first `rotated` positions of a sequence
  const float* sines;
  int64_t rotated;
  const int64_t* picked;
  void* const* keys;  // per layer, [slots, kv_heads, width, head_dim]
  void* const* values;
  int64_t slot_stride, head_stride;
  void* hidden;  // last hidden states, [picks, hidden]
  float* logits;  // [picks, vocabulary padded to a multiple of COLUMNS]
  int64_t* tokens;
  float* confidences;
};
