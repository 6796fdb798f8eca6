// Values by name that many copies share.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace shardlab {

/// A map from names to values, in the order of the names. Copies share one map until one of them is changed: the cases of a sweep hold
/// the constants of their machine a million times.
template <class T>
class ByName {
 public:
  using Map = std::map<std::string, T>;

  ByName() = default;
  ByName(std::initializer_list<typename Map::value_type> values) : shared_(std::make_shared<Map>(values)) {}

  typename Map::const_iterator begin() const { return map().begin(); }
  typename Map::const_iterator end() const { return map().end(); }
  typename Map::const_iterator find(const std::string& name) const { return map().find(name); }
  bool contains(const std::string& name) const { return map().contains(name); }
  const T& at(const std::string& name) const { return map().at(name); }
  bool empty() const { return map().empty(); }
  size_t size() const { return map().size(); }

  T& operator[](const std::string& name) { return own()[name]; }
  void erase(const std::string& name) {
    if (contains(name)) own().erase(name);
  }
  void clear() { shared_.reset(); }

  friend bool operator==(const ByName& a, const ByName& b) { return a.shared_ == b.shared_ || a.map() == b.map(); }

 private:
  const Map& map() const {
    static const Map none;
    return shared_ ? *shared_ : none;
  }
  /// The map, shared with nobody.
  Map& own() {
    if (!shared_)
      shared_ = std::make_shared<Map>();
    else if (shared_.use_count() > 1)
      shared_ = std::make_shared<Map>(*shared_);
    return *shared_;
  }

  std::shared_ptr<Map> shared_;
};

}  // namespace shardlab
