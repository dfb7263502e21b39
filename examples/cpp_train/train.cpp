// Trains a small Llama on the bytes of a text file, in fp32, on the CPU or on a CUDA device: README.md.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>

#include "model.h"

namespace {

using namespace example;

constexpr const char* kUsage = R"(train --text FILE [options]
  --text FILE       what is learned; every byte is a token
  --steps N         100
  --batch N         8        windows of a step
  --seq N           64       tokens of a window
  --layers N        2
  --hidden N        128
  --heads N         4
  --kv-heads N      as many as heads
  --intermediate N  8/3 hidden, a multiple of 16
  --lr X            1e-3     AdamW, betas 0.9 and 0.999
  --decay X         0.01
  --eps X           1e-8
  --seed N          0        of the random weights
  --device NAME     cpu      or cuda
  --threads N       0        of the CPU; 0 takes all
  --weights FILE    initial weights; the file's sizes replace those above
  --save FILE       the weights after the last step, in the same form
  --log FILE        "step loss" of every step
)";

// "--name value" pairs; what nobody asks for is an error.
class Options {
 public:
  Options(int count, char** words) {
    for (int i = 1; i < count; i += 2) {
      const std::string name = words[i];
      if (name == "--help" || name == "-h") {
        std::cout << kUsage;
        std::exit(0);
      }
      LIGER_CHECK(name.starts_with("--") && i + 1 < count, name, name.starts_with("--") ? " needs a value" : " is no option", "\n", kUsage);
      given_[name.substr(2)] = words[i + 1];
    }
  }

  std::string text(const std::string& name, const std::string& otherwise) {
    const auto found = given_.find(name);
    if (found == given_.end()) return otherwise;
    const std::string value = found->second;
    given_.erase(found);
    return value;
  }
  double real(const std::string& name, double otherwise) {
    const std::string value = text(name, "");
    if (value.empty()) return otherwise;
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    LIGER_CHECK(*end == 0 && number >= 0, "--", name, ": ", value, " is no number of at least 0");
    return number;
  }
  int64_t count(const std::string& name, int64_t otherwise, int64_t least = 1) {
    const double number = real(name, static_cast<double>(otherwise));
    LIGER_CHECK(number == std::floor(number) && number >= static_cast<double>(least) && number < 1e9, "--", name, ": ", number,
                " is no whole number of at least ", least);
    return static_cast<int64_t>(number);
  }
  void finish() const {
    for (const auto& [name, value] : given_) liger::fail("--", name, " is no option\n", kUsage);
  }

 private:
  std::map<std::string, std::string> given_;
};

void check_sizes(const Config& c) {
  LIGER_CHECK(c.hidden % c.heads == 0 && c.head_dim() % 2 == 0, "hidden size ", c.hidden, " is not heads (", c.heads,
              ") times an even number");
  LIGER_CHECK(c.heads % c.kv_heads == 0, c.heads, " heads are no multiple of ", c.kv_heads, " kv-heads");
}

// Eight int32 (the magic number, a version, six sizes), then the weights as float32, in the order of Parts; little-endian.
constexpr int32_t kMagic = 0x4d414c4c, kVersion = 1;  // "LLAM"

void save(const std::string& path, const Config& c, const std::vector<float>& weights) {
  const int32_t header[8] = {
      kMagic,           kVersion,           int32_t(c.vocab), int32_t(c.hidden), int32_t(c.intermediate), int32_t(c.layers),
      int32_t(c.heads), int32_t(c.kv_heads)};
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(header), sizeof header);
  file.write(reinterpret_cast<const char*>(weights.data()), static_cast<std::streamsize>(weights.size() * sizeof(float)));
  LIGER_CHECK(file.flush(), path, " cannot be written");
}

std::vector<float> load(const std::string& path, Config& c) {
  std::ifstream file(path, std::ios::binary);
  int32_t header[8];
  LIGER_CHECK(file.read(reinterpret_cast<char*>(header), sizeof header), path, " cannot be read");
  LIGER_CHECK(header[0] == kMagic && header[1] == kVersion, path, " is no weights file of version ", kVersion);
  for (int i = 2; i < 8; ++i) LIGER_CHECK(header[i] > 0, path, ": size ", i - 2, " of the header is ", header[i]);
  c = {.vocab = header[2], .hidden = header[3], .intermediate = header[4], .layers = header[5], .heads = header[6], .kv_heads = header[7]};
  check_sizes(c);
  std::vector<float> weights(Parts(c).size);
  file.read(reinterpret_cast<char*>(weights.data()), static_cast<std::streamsize>(weights.size() * sizeof(float)));
  LIGER_CHECK(file && file.peek() == EOF, path, " does not hold the ", weights.size(), " weights that its header promises");
  return weights;
}

// Consecutive windows of the text, over and over: window i has the tokens i seq to (i + 1) seq - 1, its targets are one further.
class Text {
 public:
  Text(const std::string& path, const Config& c, int64_t batch, int64_t seq) : batch_(batch), seq_(seq) {
    std::ifstream file(path, std::ios::binary);
    LIGER_CHECK(file, path, " cannot be read");
    text_.assign(std::istreambuf_iterator<char>(file), {});
    windows_ = (static_cast<int64_t>(text_.size()) - 1) / seq;
    LIGER_CHECK(windows_ > 0, path, " has ", text_.size(), " bytes; a window of --seq ", seq, " needs ", seq + 1);
    for (const unsigned char byte : text_) LIGER_CHECK(byte < c.vocab, path, " has byte ", int{byte}, ", the vocabulary ", c.vocab);
  }

  int64_t windows() const { return windows_; }

  Batch next() {
    Batch b;
    for (int64_t i = 0; i < batch_; ++i, next_ = (next_ + 1) % windows_) {
      for (int64_t t = next_ * seq_; t < (next_ + 1) * seq_; ++t) {
        b.inputs.push_back(static_cast<unsigned char>(text_[t]));
        b.targets.push_back(static_cast<unsigned char>(text_[t + 1]));
      }
    }
    return b;
  }

 private:
  std::string text_;
  int64_t batch_, seq_, windows_ = 0, next_ = 0;
};

void train(int count, char** words) {
  Options options(count, words);
  const std::string text_file = options.text("text", ""), weights_file = options.text("weights", ""), save_file = options.text("save", ""),
                    log_file = options.text("log", "");
  LIGER_CHECK(!text_file.empty(), "which text? --text FILE\n", kUsage);
  Config c;
  c.layers = options.count("layers", c.layers);
  c.hidden = options.count("hidden", c.hidden);
  c.heads = options.count("heads", c.heads);
  c.kv_heads = options.count("kv-heads", c.heads);
  c.intermediate = options.count("intermediate", (8 * c.hidden / 3 + 15) / 16 * 16);
  const int64_t steps = options.count("steps", 100), batch = options.count("batch", 8), seq = options.count("seq", 64);
  const uint64_t seed = static_cast<uint64_t>(options.count("seed", 0, 0));
  const AdamWOptions adamw{.lr = options.real("lr", 1e-3), .eps = options.real("eps", 1e-8), .decay = options.real("decay", 0.01)};
  const std::string device_name = options.text("device", "cpu");
  const int threads = static_cast<int>(options.count("threads", 0, 0));
  options.finish();

  check_sizes(c);
  const std::vector<float> weights = weights_file.empty() ? random_weights(c, seed) : load(weights_file, c);
  Text text(text_file, c, batch, seq);
  const Device device(device_name, threads);
  Model model(device, c, weights, batch, seq);
  std::cout << describe(device.host().machine) << '\n'
            << weights.size() << " weights: " << c.layers << " layers, hidden " << c.hidden << ", intermediate " << c.intermediate << ", "
            << c.heads << " heads on " << c.kv_heads << "; " << batch << " x " << seq << " tokens a step, " << text.windows()
            << " windows of text\n";

  std::ofstream log;
  if (!log_file.empty()) log.open(log_file);
  LIGER_CHECK(log_file.empty() || log, log_file, " cannot be written");
  using Clock = std::chrono::steady_clock;
  auto start = Clock::now();  // of the steps since the last line
  int64_t timed = 0;
  for (int64_t step = 0; step < steps; ++step, ++timed) {
    const float loss = model.forward_backward(text.next());
    model.update(adamw);
    char line[64];
    std::snprintf(line, sizeof line, "%lld %.9g\n", static_cast<long long>(step), loss);
    log << line;
    if (step % 10 != 0 && step + 1 < steps) continue;
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count() / static_cast<double>(timed + 1);
    std::printf("step %lld  loss %.4f  %.1f ms a step\n", static_cast<long long>(step), loss, ms);
    start = Clock::now(), timed = -1;
  }
  if (!save_file.empty()) save(save_file, c, model.weights());
}

}  // namespace

int main(int count, char** words) {
  try {
    train(count, words);
  } catch (const std::exception& e) {
    std::cerr << "train: " << e.what() << '\n';
    return 1;
  }
  return 0;
}
